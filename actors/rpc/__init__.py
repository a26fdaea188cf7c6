"""Calls sent to a device: clients, the server, and their wire."""
