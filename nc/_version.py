"""The version, in a file that the build can read without importing the package."""

__version__ = "0.2.0"
