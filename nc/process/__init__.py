"""What belongs to the whole process: its lock, torch's settings and modes, warnings, the installation, the cache of compiled code."""
