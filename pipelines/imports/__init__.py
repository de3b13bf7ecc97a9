"""Importers of public request traces; each counts and explains every row it fixes or rejects."""
