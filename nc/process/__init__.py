"""What belongs to the whole process.

Its lock, torch's settings and modes, warnings, the installation, the cache of compiled code.
"""
