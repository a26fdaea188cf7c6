"""`lz report`, `lz compare`, `lz parity`, `lz gate`: what a machine does, what differs, what may go out."""
