"""Adapters to other libraries, one file each. Nothing here is imported by the package itself."""
