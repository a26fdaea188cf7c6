"""An op and its kernels for LayerZero; nothing is imported here, so that parts load when used."""
