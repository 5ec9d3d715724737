"""A Hub of model repositories on loopback, as far as its Python client uses one: for tests, with faults on demand."""
