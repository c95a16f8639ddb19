# How a compiled class says that it is of the package, from which users import it.

cdef extern from *:
    """
    /* A type that is made in C has the name of its module in its own. */
    static inline void pgf_name_type(PyObject *type, const char *name) {
        ((PyTypeObject *) type)->tp_name = name;
    }
    """
    void name_type "pgf_name_type"(object type, const char *name)
