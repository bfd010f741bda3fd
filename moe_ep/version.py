"""Which version of the library is this?"""

__version__ = "0.1.0"
