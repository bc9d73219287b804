"""What `prepare` returns: models under calibration."""
