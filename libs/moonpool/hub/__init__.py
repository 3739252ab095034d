"""Models on disk: find, pull, verify and convert them; config, tokenizer, detokenizer, chat template.

No file here imports torch: the router and the CLI read models through this package.
"""

from moonpool.hub.model_config import ModelConfig
from moonpool.hub.model_dir import ModelDir, resolve
from moonpool.hub.progress import Progress, no_progress
from moonpool.hub.pull import pull

__all__ = ["ModelConfig", "ModelDir", "Progress", "no_progress", "pull", "resolve"]
