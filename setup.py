"""The one compiled part: host/*.cpp as an extension that any CPython from 3.11 on can load."""

from setuptools import Extension, setup

HOST = "converter/humming_convert/host"

setup(
    ext_modules=[
        Extension(
            "humming_convert.host._native",
            sources=[f"{HOST}/{name}.cpp" for name in ("module", "codes", "repack", "repack_avx2", "awq", "scales")],
            depends=[f"{HOST}/native.h"],
            language="c++",
            extra_compile_args=["-std=c++17", "-O3", "-fvisibility=hidden", "-Wall", "-Wextra"],
            define_macros=[("Py_LIMITED_API", "0x030B0000"), ("NDEBUG", None)],
            py_limited_api=True,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
