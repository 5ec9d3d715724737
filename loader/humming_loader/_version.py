"""The one place where the version is written; both packages and the build read it."""

__version__ = "0.1.0"
