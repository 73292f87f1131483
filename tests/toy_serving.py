"""What serves the toy of `tests/toy_server.py`: the real server with its worker replaced."""

import functools
from dataclasses import replace
from pathlib import Path

from tests.toy_server import worker
from trimtab.request import LoadRequest
from trimtab.serve import run
from trimtab.serve.contract.settings import Limits, Settings
from trimtab.serve.pool import Pool
from trimtab.serve.worker.registry import ServedModel
from trimtab.serve.worker.supervisor import Supervisor


def main(options):
    limits = Limits(**options.pop("limits", {}))
    keys, key_file = tuple(options.pop("api_keys", ())), options.pop("key_file", None)
    if (files := options.pop("files", None)) is not None:
        import resource

        resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    run.Pool = functools.partial(Pool, make=functools.partial(Supervisor, target=worker))
    served = ServedModel(name="toy", request=LoadRequest(model="none"))
    if "adapter_root" in options:
        options["adapter_root"] = Path(options["adapter_root"])
    settings = Settings(page=False, api_keys=keys, limits=limits, **options)

    def reread():
        return [served], replace(settings, api_keys=(Path(key_file).read_text(encoding="utf-8"),)), ()

    run.serve([served], settings, say=lambda text: print(text, flush=True), reread=reread if key_file else None)
    print("ended", flush=True)
