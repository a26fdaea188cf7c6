"""Four kinds of load that are hit again and again, what became of each of their calls, and what they hold."""
