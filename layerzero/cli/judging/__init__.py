"""`lz report`, `lz compare` and `lz gate`: what a machine does, what two differ in, what may be released."""
