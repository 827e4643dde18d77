"""The passes, one file each."""

if __name__ != "h3compile.passes":
    # pytest or a script started in the repository root would otherwise load this package a second time.
    raise ImportError("import this package as h3compile.passes")
