"""Cannot be imported."""

# expect: load | ModuleNotFoundError
import a_module_that_does_not_exist  # noqa: F401


def custom_kernel(data):
    return None
