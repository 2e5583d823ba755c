"""`fedmpq client --fetch-model`: this client's own model as a file for an inference runtime, and its card."""

from __future__ import annotations

import logging
from pathlib import Path

import grpc
import grpc.aio

from fedmpq.edge_client.backoff import Backoff
from fedmpq.edge_client.channel import Endpoint, Federation, federation
from fedmpq.edge_client.chunk_length import ChunkLength
from fedmpq.edge_client.connection import RefusedError, may_help, pause, said
from fedmpq.edge_client.identity import Identity, load_identity
from fedmpq.edge_client.transfer import Patience, TransferError, download, have, within
from fedmpq.proto import federation_pb2 as pb
from fedmpq.system.durable_files import flush, write_durably

EXPORT_SECONDS = 600.0
"""The server may have to make the file first."""

log = logging.getLogger("fedmpq.client")


async def fetch_model(
    endpoint: Endpoint, identity_file: Path, wanted: str, folder: Path, retry: Backoff, patience: Patience
) -> Path:
    """Downloads the file into `folder`; after a cut or a restart the download goes on where it broke."""
    identity = known_identity(identity_file)
    folder.mkdir(parents=True, exist_ok=True)
    chunks = ChunkLength()
    while True:
        try:
            async with endpoint.open() as channel:
                return await _fetch(federation(channel), identity, wanted, folder, retry, patience, chunks)
        except grpc.aio.AioRpcError as error:
            # A file that is gone was replaced by a newer model's since it was offered.
            if not may_help(error) and error.code() is not grpc.StatusCode.NOT_FOUND:
                raise RefusedError(f"{endpoint.address} gave no model: {said(error)}") from None
            cause = said(error)
        except TransferError as error:
            cause = str(error)
        await pause(retry, f"the model did not come ({cause})")


def known_identity(file: Path) -> Identity:
    """Of a client that has enrolled."""
    identity = load_identity(file)
    if identity is None:
        raise RefusedError(f"this client is not enrolled yet, there is no {file}: take part in a run first")
    return identity


async def _fetch(
    stub: Federation,
    identity: Identity,
    wanted: str,
    folder: Path,
    retry: Backoff,
    patience: Patience,
    chunks: ChunkLength,
) -> Path:
    request = pb.GetModelRequest(format=wanted)
    offer = await within(EXPORT_SECONDS, stub.GetModel(request, metadata=identity.metadata), "the export")
    # The name comes from the server: never a way out of the folder.
    path = folder / Path(offer.file_name).name
    await download_offer(stub, identity, offer, path, retry, patience, chunks)
    return path


async def download_offer(
    stub: Federation,
    identity: Identity,
    offer: pb.ModelOffer,
    path: Path,
    retry: Backoff,
    patience: Patience,
    chunks: ChunkLength,
) -> None:
    """The offered file at `path`, unless it is there already, and its card beside it."""
    if not have(path, offer.payload):
        what = offer.payload, offer.payload_bytes, path
        await download(stub, identity.metadata, retry, *what, patience, chunks)
    # The card comes last: a model that has one is whole, whatever happens now.
    flush(path)
    write_durably(path.with_name(f"{path.name}.json"), offer.card.encode())
    log.info("%s: %d bytes, verified by the server's runtime", path, offer.payload_bytes)
