"""Choose, explain and run the fastest healthy kernel for an operation, and batch awaited calls."""
