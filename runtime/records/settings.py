"""What is recorded, where, and how much of it: the keys under `records` of the service file."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class RecordEntry(BaseModel):
    """dir: folder of the records, made if absent (none: nothing is recorded). file_mib: a file that has grown so large is followed by a new
    one. files_max: of each kind; the oldest beyond that are deleted. queue_max: records waiting for the disk; further ones are dropped and
    counted. observations: each decision's inputs too, without which it cannot be replayed. prompt_ids: each prompt's token ids; NO prompt
    text or ids are kept otherwise."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    dir: str | None = None
    file_mib: float = Field(default=64.0, gt=0, le=4096)
    files_max: int = Field(default=16, ge=2, le=10_000)
    queue_max: int = Field(default=20_000, ge=1, le=1_000_000)
    observations: bool = True
    prompt_ids: bool = False
