"""Tuning records, one folder a device: data that is installed beside the packages."""
