"""On PYTHONPATH: an environment with torch and nothing else. What is installed beside it is not found."""
import importlib.machinery
import sys

HIDDEN = ("numpy", "safetensors", "xxhash", "transformers", "jsonschema", "pytest")


class OnlyTorch(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.split(".")[0] in HIDDEN else super().find_spec(name, path, target)


sys.meta_path[sys.meta_path.index(importlib.machinery.PathFinder)] = OnlyTorch
