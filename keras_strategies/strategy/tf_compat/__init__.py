"""Names and options of tf.distribute that mean less here, or nothing."""
