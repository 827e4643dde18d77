"""What is known of MiniMax-H3 and of the files it comes in."""

if __name__ != "h3compile.models":
    # pytest or a script started in the repository root would otherwise load this package a second time.
    raise ImportError("import this package as h3compile.models")
