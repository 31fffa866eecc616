"""Names and options from tf.distribute that have little or no effect here."""
