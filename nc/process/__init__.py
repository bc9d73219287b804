"""What belongs to the whole process.

It has its lock, torch's settings and modes, warnings, the installation, and the cache of compiled code.
"""
