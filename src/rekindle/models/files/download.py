"""Download of one file from the Hugging Face Hub; each failure becomes one sentence."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rekindle.errors import StartupError

_log = logging.getLogger(__name__)

FORMS = "hf:owner/repo/file.gguf or hf:owner/repo:quant"


def download(repository: str, file_name: str, model: str) -> Path:
    """Return the downloaded file. `model` is the operator's text. Raises StartupError."""
    from huggingface_hub import constants, hf_hub_download

    _log.info("download: file=%s repository=%s hub=%s", file_name, repository, constants.ENDPOINT)
    with hub_errors(repository, file_name, model):
        return Path(hf_hub_download(repository, file_name))


@contextmanager
def hub_errors(repository: str, file_name: str, model: str) -> Iterator[None]:
    """Raise StartupError, one sentence, for each error of the Hub."""
    import httpx2
    from huggingface_hub import constants, errors

    logging.getLogger("huggingface_hub").handlers.clear()  # ours writes its warnings, too
    try:
        yield
    except errors.HFValidationError as error:
        raise StartupError(f"{model} must be written as {FORMS}.") from error
    except errors.OfflineModeIsEnabled as error:
        raise StartupError(
            f"{file_name} of {repository} is not on this machine, and HF_HUB_OFFLINE is set."
        ) from error
    except errors.GatedRepoError as error:
        raise StartupError(
            f"Request access to {repository} on its page, then set HF_TOKEN."
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise StartupError(
            f"There is no repository {repository}, or it is private and HF_TOKEN gives no access."
        ) from error
    except errors.RemoteEntryNotFoundError as error:
        raise StartupError(f"The repository {repository} has no file {file_name}.") from error
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        hint = "; check HF_TOKEN" if status in (401, 403) else ""
        raise StartupError(
            f"{constants.ENDPOINT} answered {status} for {file_name} in {repository}{hint}."
        ) from error
    except errors.LocalEntryNotFoundError as error:
        raise StartupError(
            f"{file_name} of {repository} is not on this machine, and {_why_not(error)}."
        ) from error
    except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
        raise StartupError(
            f"{constants.ENDPOINT} cannot be reached, and {repository} is not on this machine:"
            f" {error}."
        ) from error
    except httpx2.HTTPError as error:
        raise StartupError(f"The download of {file_name} failed: {error}.") from error
    except OSError as error:
        raise StartupError(f"{file_name} cannot be stored: {error}.") from error


def _why_not(error: Exception) -> str:
    """Return the reason, which the library hides in the cause of its error."""
    from huggingface_hub import constants, errors

    match error.__cause__:
        case errors.OfflineModeIsEnabled():
            return "HF_HUB_OFFLINE is set"
        case errors.HfHubHTTPError(response=response):
            hint = "; check HF_TOKEN" if response.status_code == 403 else ""
            return f"{constants.ENDPOINT} answered {response.status_code}{hint}"
        case errors.FileMetadataError():
            return f"{constants.ENDPOINT} does not answer like a Hugging Face Hub"
    return f"{constants.ENDPOINT} cannot be reached"
