from tests.loading.conftest import folder

__all__ = ["folder"]
