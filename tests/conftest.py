import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Small tensors are slower on several threads, and much slower when tests share the machine."""
    torch.set_num_threads(1)
