"""The attention call: public function, settings, reference and exact oracle."""
