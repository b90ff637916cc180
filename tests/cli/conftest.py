from tests.hf.conftest import folder

__all__ = ["folder"]
