def missing():
    return "not built yet"
