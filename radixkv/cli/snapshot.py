"""`radixkv snapshot`."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import click

from radixkv.cli.common import Choice, Command, json_option
from radixkv.errors import RadixKVError
from radixkv.progress import shown_progress


@click.command("snapshot", cls=Command)
@click.argument("what", type=Choice(("info", "verify", "merge")))
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@json_option
def command(arguments: SimpleNamespace) -> None:
    """Look into, verify or merge the files that PrefixCache.save writes; no model is loaded.

    info says what is in a file; verify reads every page of it; merge writes one file of several:
    the new file comes first.
    """
    from radixkv.cache import snapshot

    files = arguments.files
    shown = not arguments.json
    try:
        if arguments.what == "merge":
            if len(files) < 3:
                raise ValueError(
                    f"FILE: expected a new file and at least two snapshots, got {len(files)} in all"
                )
            snapshot.merge(files[0], files[1:], progress=shown)
            files = files[:1]
        reports = [_snapshot_report(file, arguments.what, shown) for file in files]
    except OSError as error:
        raise RadixKVError(f"FILE: expected a readable snapshot; {error}") from error
    if arguments.json:
        print(json.dumps(reports, indent=2))
    else:
        for report in reports:
            for name, value in report.items():
                print(f"{name:15} {value:,}" if isinstance(value, int) else f"{name:15} {value}")
    damaged = [report["file"] for report in reports if report.get("damaged_pages")]
    if damaged:
        raise RadixKVError(
            f"{', '.join(damaged)}: has damaged pages; PrefixCache.load(..., salvage=True) loads "
            f"the rest"
        )


def _snapshot_report(file: str, what: str, shown: bool) -> dict[str, Any]:
    from radixkv.cache import snapshot

    with snapshot.Snapshot(file) as found:
        tree = found.tree
        report = {
            "file": file,
            "bytes": found.num_bytes,
            "format_version": found.version,
            "written_by": f"radixkv {found.writer}",
            "namespaces": len(tree.namespaces),
            "nodes": len(tree),
            "tokens": int(tree.length.sum()),
            "pages": found.num_pages,
            **found.layout,
            "model": found.fingerprint.get("class", "none: a cache by itself"),
            "model_weights": found.fingerprint.get("weights", ""),
        }
        if what == "verify":
            with shown_progress("verifying", shown) as tell:
                report["damaged_pages"] = len(found.damaged_pages(tell))
        return report
