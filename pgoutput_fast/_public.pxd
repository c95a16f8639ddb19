# Rename a compiled class to the package from which users import it.

cdef extern from *:
    """
    /* In a type that is written in C, tp_name holds the module's name and the class's name. */
    static inline void pgf_name_type(PyObject *type, const char *name) {
        ((PyTypeObject *) type)->tp_name = name;
    }
    """
    void name_type "pgf_name_type"(object type, const char *name)
