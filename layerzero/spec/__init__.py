"""Values: what a call asks, what a kernel can, hardware, settings, reasons, errors."""
