"""The format of checkpoints on disk, without jax and keras.

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

from keras_strategies.checkpoint.directory.corruption import (
    DamagedCheckpoint as DamagedCheckpoint,
)
from keras_strategies.checkpoint.directory.disk_space import (
    check_free_space as check_free_space,
)
from keras_strategies.checkpoint.directory.disk_space import (
    check_name as check_name,
)
from keras_strategies.checkpoint.directory.disk_space import (
    check_writable as check_writable,
)
from keras_strategies.checkpoint.directory.manifest import Manifest as Manifest
from keras_strategies.checkpoint.directory.manifest import (
    read_manifest as read_manifest,
)
from keras_strategies.checkpoint.directory.manifest import (
    write_manifest as write_manifest,
)
from keras_strategies.checkpoint.directory.names import find_steps as find_steps
from keras_strategies.checkpoint.directory.names import (
    make_directory as make_directory,
)
from keras_strategies.checkpoint.directory.names import (
    partial_saves as partial_saves,
)
from keras_strategies.checkpoint.directory.names import step_of as step_of
from keras_strategies.checkpoint.directory.names import step_path as step_path
from keras_strategies.checkpoint.directory.orbax_files import (
    restoring as restoring,
)
from keras_strategies.checkpoint.directory.verify import (
    newest_good as newest_good,
)
from keras_strategies.checkpoint.directory.verify import reading as reading
from keras_strategies.checkpoint.directory.verify import verify as verify
