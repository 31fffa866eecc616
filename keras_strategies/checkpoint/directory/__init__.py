"""The files of checkpoints on disk, without jax and keras.

    <directory>/                  0700 where we make it
        .lock                     who writes here
        <step>/                   ^(0|[1-9][0-9]*)$: train steps done
            _CHECKPOINT_METADATA  Orbax's
            state/...             Orbax's item of arrays
            run/metadata          Orbax's item of JSON: all that is no array
            manifest.json         ours, last: size and sha256 of the others
        <step>.orbax-checkpoint-tmp*/   left by a save that was killed
        <step>.deleting-*/        left by a deletion that was killed

A checkpoint is good if its folder holds exactly the files that its manifest
lists, as it lists them. Nothing in it is a link or a pickle, and nothing
outside of it is read.
"""
