"""Keeps other libraries' progress bars and chatter off a screen that has its own."""


def quiet_libraries() -> None:
    """Call before models are loaded; their warnings and errors still show."""
    from datasets.utils.logging import disable_progress_bar as quiet_datasets
    from transformers.utils.logging import disable_progress_bar as quiet_transformers

    quiet_datasets()
    quiet_transformers()
