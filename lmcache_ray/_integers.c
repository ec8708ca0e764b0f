/* Packs Python's integers into an array, several times as fast as Python itself does.
 *
 * It takes the plain case alone: exact ints from 0 to 2^63 - 1 in a list or tuple. Whether anything else is an integer,
 * and what to say if it is not, is decided in Python (`arrays.py`).
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>

enum { FORMAT = 1 }; /* changes with the functions' arguments */

static PyObject *pack(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *values;
    Py_buffer packed;
    if (!PyArg_ParseTuple(args, "Ow*", &values, &packed))
        return NULL;
    /* No code of Python's runs while exact ints are read, so the sequence stays as it is. */
    PyObject *result = NULL;
    const int is_sequence = PyList_Check(values) || PyTuple_Check(values);
    if (!is_sequence || packed.len != PySequence_Fast_GET_SIZE(values) * (Py_ssize_t)sizeof(int64_t))
        PyErr_SetString(PyExc_ValueError, "a list or tuple, and 8 bytes for each of its values, are needed");
    else {
        PyObject **items = PySequence_Fast_ITEMS(values);
        int64_t *numbers = packed.buf;
        const Py_ssize_t count = packed.len / (Py_ssize_t)sizeof(int64_t);
        Py_ssize_t at = 0;
        for (; at < count && PyLong_CheckExact(items[at]); at++) {
            int overflow;
            const long long number = PyLong_AsLongLongAndOverflow(items[at], &overflow);
            if (number < 0 || overflow)
                break;
            numbers[at] = number;
        }
        result = PyBool_FromLong(at == count);
    }
    PyBuffer_Release(&packed);
    return result;
}

static PyMethodDef methods[] = {
    {"pack", pack, METH_VARARGS,
     "pack(values, packed): write each value of a list or tuple as int64; False if one is no exact int, or not within 0 "
     "to 2**63 - 1, and `packed` is then unfinished."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_integers",
    .m_doc = "Packs Python's integers into an array.",
    .m_size = 0,
    .m_methods = methods,
};

PyMODINIT_FUNC PyInit__integers(void)
{
    PyObject *module = PyModule_Create(&definition);
    if (module != NULL && PyModule_AddIntConstant(module, "FORMAT", FORMAT) < 0)
        Py_CLEAR(module);
    return module;
}
