"""The files of checkpoints on disk, without jax and keras.

    <directory>/                  mode 0700 if we create it
        .lock                     locked by the process that writes here
        <step>/                   number of train steps: ^(0|[1-9][0-9]*)$
            _CHECKPOINT_METADATA  written by Orbax
            state/...             Orbax's item of arrays
            run/metadata          Orbax's JSON item: everything else
            manifest.json         written last: size and sha256 of other files
        <step>.saving*/           left by a killed save
        <step>.deleting-*/        left by a killed deletion

A checkpoint is good if its directory contains exactly the files that its
manifest lists, with the listed sizes and checksums. A good checkpoint contains
no links and no pickles, and restoring it reads no files outside of its
directory.
"""
