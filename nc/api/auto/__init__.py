"""`config="auto"`: what is tried, how it is judged, and what is chosen."""
