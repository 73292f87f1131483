"""What do the files of a model contain, read without weights and without torch?"""

from trimtab.checkpoint.folder import Checkpoint, check_unchanged, read_checkpoint
from trimtab.checkpoint.headers import Header, TensorEntry, read_header

__all__ = ["Checkpoint", "Header", "TensorEntry", "check_unchanged", "read_checkpoint", "read_header"]
