"""A captured model under calibration."""
