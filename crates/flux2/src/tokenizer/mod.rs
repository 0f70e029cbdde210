//! From a prompt to token ids of fixed length.

#[cfg(test)]
mod tests;

use serde::Deserialize;
use tokenizers::Tokenizer;
use weights::ModelFolder;

use crate::error::{Error, Result};

/// Token ids of one prompt.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Tokens {
    /// Ids, cut and padded on the right to the tokenizer's length.
    pub ids: Vec<u32>,
    /// Number of ids before padding. A padding token that was typed in the prompt counts as a real one.
    pub n_real: usize,
    /// Number of ids that were cut off at the end of the prompt with its template.
    pub dropped: usize,
}

impl Tokens {
    /// 1 for every real token, 0 for padding.
    pub fn mask(&self) -> Vec<u32> {
        (0..self.ids.len()).map(|i| u32::from(i < self.n_real)).collect()
    }
}

/// Tokenises prompts the way the published pipelines do.
///
/// The prompt becomes one user turn of the chat template with thinking switched off, and the whole text is tokenised at
/// once, so that white space at the start of a prompt merges with the template as it does in the reference.
///
/// Special tokens that are typed in a prompt (`<|im_end|>`, `<|endoftext|>`, `<think>`) are matched as special tokens, as
/// the reference tokenizer does: text from a stranger can end the user turn. Nothing is stripped or escaped here.
#[derive(Clone)]
pub struct PromptTokenizer {
    tokenizer: Tokenizer,
    max_sequence_length: usize,
    pad_token_id: u32,
}

impl std::fmt::Debug for PromptTokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PromptTokenizer")
            .field("max_sequence_length", &self.max_sequence_length)
            .field("pad_token_id", &self.pad_token_id)
            .finish_non_exhaustive()
    }
}

/// What matters of `tokenizer_config.json`.
#[derive(Debug, Default, Deserialize)]
struct TokenizerConfig {
    #[serde(default)]
    pad_token: Option<PadToken>,
    #[serde(default)]
    padding_side: Option<String>,
}

/// A token as plain text or as an object.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum PadToken {
    Text(String),
    Added { content: String },
}

const TOKENIZER: &str = "tokenizer/tokenizer.json";
const TOKENIZER_CONFIG: &str = "tokenizer/tokenizer_config.json";

impl PromptTokenizer {
    /// Loads `tokenizer/tokenizer.json`. The padding token is the one of `tokenizer/tokenizer_config.json`, else
    /// `pad_token_id`.
    ///
    /// # Errors
    /// [`Error::Weights`] if a file is missing or cannot be read, [`Error::Tokenizer`] if the tokenizer library refuses it,
    /// [`Error::Config`] if there is no padding token or the text is padded on the left.
    pub fn load(folder: &ModelFolder, max_sequence_length: usize, pad_token_id: Option<u32>) -> Result<Self> {
        let mut tokenizer = Tokenizer::from_bytes(folder.read(TOKENIZER)?)
            .map_err(|source| Error::Tokenizer { path: format!("{}/{TOKENIZER}", folder.describe()), source })?;
        // A saved tokenizer may carry a fixed padding, which would make every row look real.
        tokenizer.with_padding(None);
        tokenizer
            .with_truncation(None)
            .map_err(|source| Error::Tokenizer { path: format!("{}/{TOKENIZER}", folder.describe()), source })?;
        let config: TokenizerConfig =
            if folder.contains(TOKENIZER_CONFIG) { folder.json(TOKENIZER_CONFIG)? } else { TokenizerConfig::default() };
        if let Some(side) = config.padding_side
            && side != "right"
        {
            return Err(Error::Config {
                component: "tokenizer",
                field: "padding_side",
                value: side,
                expected: "right".to_owned(),
            });
        }
        let pad_token = config.pad_token.map(|token| match token {
            PadToken::Text(text) | PadToken::Added { content: text } => text,
        });
        let pad = pad_token.as_deref().and_then(|token| tokenizer.token_to_id(token)).or(pad_token_id);
        let Some(pad_token_id) = pad else {
            return Err(Error::Config {
                component: "tokenizer",
                field: "pad_token",
                value: format!("{pad_token:?}"),
                expected: "a token of tokenizer.json, or pad_token_id in the text encoder's config".to_owned(),
            });
        };
        Ok(Self { tokenizer, max_sequence_length, pad_token_id })
    }

    /// Number of ids that [`Self::encode`] returns.
    pub fn max_sequence_length(&self) -> usize {
        self.max_sequence_length
    }

    /// Id that fills up short prompts.
    pub fn pad_token_id(&self) -> u32 {
        self.pad_token_id
    }

    /// The text that is tokenised for `prompt`: one user turn, then an assistant turn with an empty thought.
    pub fn apply_chat_template(prompt: &str) -> String {
        format!("<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n")
    }

    /// Tokenises one prompt; a text that is too long loses its end (the template's suffix first).
    ///
    /// # Errors
    /// [`Error::Tokenizer`] if the tokenizer library fails on the text.
    pub fn encode(&self, prompt: &str) -> Result<Tokens> {
        let text = Self::apply_chat_template(prompt);
        let encoding = self
            .tokenizer
            .encode_fast(text, true)
            .map_err(|source| Error::Tokenizer { path: TOKENIZER.to_owned(), source })?;
        let mut ids = encoding.get_ids().to_vec();
        let total = ids.len();
        ids.resize(self.max_sequence_length, self.pad_token_id);
        let n_real = total.min(self.max_sequence_length);
        if n_real == 0 {
            return Err(Error::Config {
                component: "tokenizer",
                field: "vocab",
                value: "no token for the chat template".to_owned(),
                expected: "a vocabulary that covers it".to_owned(),
            });
        }
        Ok(Tokens { ids, n_real, dropped: total - n_real })
    }
}
