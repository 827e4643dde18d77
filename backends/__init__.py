"""The backends: each lowers regions to something a runner can execute."""

if __name__ != "h3compile.backends":
    # pytest or a script started in the repository root would otherwise load this package a second time.
    raise ImportError("import this package as h3compile.backends")
