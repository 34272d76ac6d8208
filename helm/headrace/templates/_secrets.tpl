{{/* Secret values: what is given, else what the cluster has, else something new. */}}

{{/* Takes a dict of root, secret, key and given. */}}
{{- define "headrace.secretValue" -}}
{{- if .given -}}
{{- .given -}}
{{- else -}}
{{- $found := lookup "v1" "Secret" .root.Release.Namespace .secret -}}
{{- $kept := get (default (dict) $found.data) .key -}}
{{- if $kept -}}{{ b64dec $kept }}{{- else -}}{{ randAlphaNum 40 }}{{- end -}}
{{- end -}}
{{- end }}

{{/* What must restart pods when it changes. Made-up values are left out: they do not change. */}}
{{- define "headrace.secretChecksum" -}}
{{- list .Values.auth .Values.tls .Values.store.type .Values.store.external .Values.store.valkey.password .Values.store.valkey.existingSecret .Values.hfToken | toJson | sha256sum -}}
{{- end }}
