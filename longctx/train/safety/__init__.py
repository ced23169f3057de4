"""Guards against strangers' files, broken machines and other processes."""
