// An empty Python module: importing it finds the shared library, whose plain C functions are called through ctypes.

#define PY_SSIZE_T_CLEAN
#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030B0000
#endif
#include <Python.h>

static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_native", "Operators on packed weights, called through ctypes.",
                                 -1, nullptr, nullptr, nullptr, nullptr, nullptr};

PyMODINIT_FUNC PyInit__native(void) { return PyModule_Create(&definition); }
