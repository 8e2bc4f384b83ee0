"""DistilBERT: a sentence classifier, fine-tuned from a Hugging Face encoder or from scratch."""
