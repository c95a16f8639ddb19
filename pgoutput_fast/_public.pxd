# Gives a compiled class the name of the package from which users import it.

cdef extern from *:
    """
    /* The name of a type that is made in C contains that of its module. */
    static inline void pgf_name_type(PyObject *type, const char *name) {
        ((PyTypeObject *) type)->tp_name = name;
    }
    """
    void name_type "pgf_name_type"(object type, const char *name)
