"""Devices that live in Ray actors."""
