"""Names and options of tf.distribute that have little or no effect here."""
