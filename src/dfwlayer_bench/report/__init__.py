"""What every report is made of: text, figures, a document, HTML, the machine, a progress bar."""
