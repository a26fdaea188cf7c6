"""Kernels of Hugging Face's kernel hub: downloaded, checked against a lock file, and loaded"""

from layerzero.backends.hub.repository import Hub as Hub
from layerzero.backends.hub.repository import hub_kernel as hub_kernel
from layerzero.backends.hub.repository import lock_folder as lock_folder
